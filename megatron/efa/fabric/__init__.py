"""What EFA's software needs: environment variables, as data with their sources."""
