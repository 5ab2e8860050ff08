import sys
from pathlib import Path

PROJECTS = ("char_gpt", "digits_cnn", "planted")
sys.path[:0] = [str(Path(__file__).parent / project) for project in PROJECTS]

# The planted faults fail on purpose: they run only when their folder or file is named.
collect_ignore = ["planted"]
