package native

// torchrun's command line is dlrover-run's own.
func torchrun() Launcher {
	return Launcher{
		Name: "torchrun", Usage: "[options] [--] training_script [script arguments]",
		About: "torchrun's command line, as dlrover-run reads it.",
	}
}
