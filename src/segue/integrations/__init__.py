"""Libraries whose models segue runs."""
