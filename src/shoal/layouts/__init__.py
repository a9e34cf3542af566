"""How a replica of the model is spread inside an island of workers."""
