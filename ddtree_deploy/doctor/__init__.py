"""The doctor: facts gathered by the agent, and checks that judge them; one check a function, one stable code each."""
