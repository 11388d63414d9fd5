"""What is cast, and to what: cast policies, the tables that give them to ops, and their validation."""
