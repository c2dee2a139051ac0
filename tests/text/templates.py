"""Chat templates for tests, shaped like released ones (what they read and write, not their text)."""

from strata_jax.text.chat import ChatTemplate
from tests.text.small import embedded_metadata, small_tokenizer

EMBEDDED = str(embedded_metadata()["tokenizer.chat_template"])

PLAIN = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# What the Qwen3.8 template does, by its descriptions: effort with an alias and a closed list, a
# system turn of its own, tool calls in XML, tool answers inside user turns, thoughts kept.
QWEN = """\
{%- if not messages %}{{- raise_exception('there are no messages') }}{%- endif %}
{%- macro text_of(content) %}
    {%- if content is string %}{{- content }}
    {%- else %}{%- for part in content %}{{- part.text }}{%- endfor %}{%- endif %}
{%- endmacro %}
{%- set effort = reasoning_effort|default('xhigh') %}
{%- if effort not in ('xhigh', 'medium', 'low') %}
    {{- raise_exception('no such effort: ' ~ reasoning_effort) }}
{%- endif %}
{%- if tools %}
    {{- '<|im_start|>system\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' ~ tool|tojson }}{%- endfor %}
    {{- '\\n</tools>\\nCall with <tool_call>.<|im_end|>\\n' }}
{%- endif %}
{%- if effort == 'low' %}{{- '<|im_start|>system\\nthink little<|im_end|>\\n' }}{%- endif %}
{%- set ns = namespace(last=0) %}
{%- for message in messages %}
    {%- set content = text_of(message.content or '')|trim %}
    {%- if message.role == 'user' and not (content.startswith('<tool_response>')
            and content.endswith('</tool_response>')) %}
        {%- set ns.last = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = text_of(message.content or '')|trim %}
    {%- if message.role == 'assistant' %}
        {%- set thoughts = message.reasoning_content or '' %}
        {%- if '</think>' in content %}
            {%- set thoughts = content.split('</think>')[0].split('<think>')[-1] %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if preserve_thinking is not defined or preserve_thinking or loop.index0 > ns.last %}
            {{- '<think>\\n' + thoughts.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
            {%- for name, value in call.function.arguments|items %}
                {{- '<parameter=' + name + '>\\n' }}
                {%- set value = value|string if value is string else value|tojson|safe %}
                {{- value }}
                {{- '\\n</parameter>\\n' }}
            {%- endfor %}
            {{- '</function>\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n<think>\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

SOURCES = {"embedded": EMBEDDED, "plain": PLAIN, "qwen": QWEN}
TEMPLATES = {name: ChatTemplate(source, small_tokenizer()) for name, source in SOURCES.items()}


def user(content: object) -> dict[str, object]:
    """A message of the user."""
    return {"role": "user", "content": content}


def assistant(content: object, **more: object) -> dict[str, object]:
    """A message of the model."""
    return {"role": "assistant", "content": content, **more}


def turns(contents: list[str]) -> list[dict[str, object]]:
    """A conversation that the user begins."""
    return [user(c) if i % 2 == 0 else assistant(c) for i, c in enumerate(contents)]
