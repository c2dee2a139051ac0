"""Gates: the same requests under several configurations, compared bit for bit."""
