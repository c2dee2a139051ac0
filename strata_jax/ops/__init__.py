"""Native ops and their twins."""
