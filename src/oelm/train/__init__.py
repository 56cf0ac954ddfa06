"""Training: one loop, exact to the bit across kills, the same for every method."""
