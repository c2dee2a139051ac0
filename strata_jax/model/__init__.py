"""The model: pure functions of (params, state, input)."""
