WHICH = "that of the job"
