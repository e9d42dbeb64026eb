"""The disk tier: KV of whole blocks, kept over restarts in files named by what their bits depend
on. The scheduler decides what is kept and what is wanted; a thread of the worker's process moves
it."""
