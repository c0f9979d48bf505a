"""The program that a host starts: `python -m training.node NODE.json`."""
