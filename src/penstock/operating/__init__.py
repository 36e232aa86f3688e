"""What people ask of a pipeline: make its tables, how far it is, whether its servers are safe, what was set aside."""
