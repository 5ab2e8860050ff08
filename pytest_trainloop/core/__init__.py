"""What everything else uses: findings, errors, reports, names of places."""
