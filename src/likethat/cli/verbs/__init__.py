"""The verbs of the command line, grouped by what they are about. Each module adds its own to the parser."""
