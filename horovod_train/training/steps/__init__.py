"""What happens in one compiled step, and what is compiled beside it: the graph, histograms. Start with step."""
