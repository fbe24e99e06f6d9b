"""What the commands do to a host's tree: plan on its facts, let the agent transact, report what was read back."""
