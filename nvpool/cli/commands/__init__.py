"""The commands of `nvpool`, one module for each noun."""
