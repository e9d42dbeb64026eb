"""OpenAI's files and batches: requests in a JSONL file, their replies in another."""
