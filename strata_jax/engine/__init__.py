"""Requests in, token ids out."""
