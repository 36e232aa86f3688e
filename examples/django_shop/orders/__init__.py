"""The app: orders and what they add up to."""
