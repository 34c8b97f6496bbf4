"""What every stage agrees on: errors, messages, names, `run.json`, shard and manifest formats, metrics.

Consumes nothing and produces nothing; it only says what things are called and how they are laid out.
It imports nothing else of ours, does no I/O, and needs neither torch nor Redis.
"""
