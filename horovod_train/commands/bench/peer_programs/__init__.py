"""What `bench peers` compares with: the same training in other ways, each a program that every rank runs."""
