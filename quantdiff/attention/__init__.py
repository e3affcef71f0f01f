"""What differential attention is: how heads pair up."""
