"""Embeddings of the served model: OpenAI's `/v1/embeddings` and the native `/encode`."""
