package native

// XPUTimerLaunch is the name of xpu_timer's launcher.
const XPUTimerLaunch = "xpu_timer_launch"

func xpuTimer() Launcher {
	return Launcher{
		Name: XPUTimerLaunch, Usage: "COMMAND [ARGUMENT ...]",
		About: "Runs the command as the only worker of a job, with hang detection.",
		Translate: func(command []string, sys *System) (Command, error) {
			args := []string{"--standalone", "--nnodes=1", "--nproc-per-node=1", "--no-python"}
			if sys.lookup("DLROVER_HANG") == "" {
				args = append(args, "--hang=auto")
			}
			return Command{Args: withScript(args, command), Alone: true, NoDefaults: true}, nil
		},
	}
}
