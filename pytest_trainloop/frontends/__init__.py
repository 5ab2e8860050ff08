"""What a user starts: the plugin, the public functions, the command that watches a script. PYTEST_DONT_REWRITE"""
