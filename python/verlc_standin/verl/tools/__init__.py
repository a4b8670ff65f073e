"""verl.tools under verlc: what a file with tools imports, and the tools that verl had until 0.7.1, under their names."""
