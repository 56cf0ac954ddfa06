"""Reports: tables and pictures from run directories."""
