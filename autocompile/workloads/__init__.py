"""What is trained: models of the catalogue and the Hub, training methods, and users' own scripts."""
