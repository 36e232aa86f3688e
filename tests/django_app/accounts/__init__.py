"""An app whose models have many-to-many fields."""
