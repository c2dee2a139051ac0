"""strata_jax: Qwen3.8-Flash-Next on a person's own machine."""

__version__ = "0.1.0"
