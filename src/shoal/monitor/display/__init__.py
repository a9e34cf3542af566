"""What a person sees while a run goes on: in a terminal, a notebook, plain lines or JSON."""
