"""Pages, plots and live views of run folders. Only reads them."""
