"""Watch one run of any training code through torch's own hooks; the outcome is a record."""
