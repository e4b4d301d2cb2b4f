"""A person's prompts, from files and the hub to items of tokens."""
