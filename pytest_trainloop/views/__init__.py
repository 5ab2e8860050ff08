"""What a reader sees: cards, pictures, the HTML report, folders to send, files of results."""
