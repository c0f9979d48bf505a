"""What people see while a run goes on: pages of HTML, progress, numbers in words."""
