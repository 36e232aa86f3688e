"""Migrations of the app, as ``makemigrations`` writes them."""
