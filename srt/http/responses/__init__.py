"""OpenAI's Responses API: a translation to chat, and a store of what was asked and answered."""
