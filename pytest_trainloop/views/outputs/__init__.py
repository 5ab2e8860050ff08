"""What a run gives to others than its terminal, made of the data of the JSON report: files, and GitHub's runner.

Shared by the sessions of pytest and by ``python -m pytest_trainloop``. No torch, no pytest.
"""
