"""What is sent to a host: standard library only, Python 3.8 and later, nothing of ours from outside this room."""
