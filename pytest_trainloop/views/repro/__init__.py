"""A failure as a folder: a script that shows it again, the finding, the environment, the record of the watched run."""
