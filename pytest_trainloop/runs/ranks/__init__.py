"""Run code in several processes of torch.distributed, and say what each of them did."""
