"""The verbs of the command line, one file each: the function that does it, and `add`, which tells the parser."""
