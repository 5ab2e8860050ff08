"""The checks, a folder each under its family. A check package imports no other check."""
