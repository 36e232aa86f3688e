"""``manage.py penstock``."""
