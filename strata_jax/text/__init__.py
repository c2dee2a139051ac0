"""Token ids to text and back; imports no jax and no engine."""
