"""What commands share: the model, its text and policies, and what these need to know."""
