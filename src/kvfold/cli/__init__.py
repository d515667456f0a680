"""The command line: one thin file per command, each a table entry in main.py."""
