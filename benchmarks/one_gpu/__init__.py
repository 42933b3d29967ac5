"""The runs that one GPU allows: commands of the project, their figures and the bounds of these."""
