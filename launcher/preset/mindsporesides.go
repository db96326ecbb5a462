package preset

import (
	"path/filepath"
	"slices"
	"strconv"
)

// mindsporeSides are the scheduler, which the workers of all nodes connect to, and the parameter servers. They execute
// the workers' script, in which MindSpore itself keeps them from training.
func mindsporeSides(v Vars) (sides []Side, err error) {
	if !meets(v) {
		return nil, nil
	}
	add := func(name, role string, more ...variable) {
		at := v
		if v.LogDir != "" {
			at.LogDir = filepath.Join(v.LogDir, name)
		}
		p := Preset{Name: "mindspore", vars: slices.Concat(process(), mindsporeJob(), more, []variable{
			text("MS_ROLE", func(Vars) string { return role }), mindsporeLogDir(),
			only(func(v Vars) bool { return v.Share != "" }, text("MS_NODE_ID", func(Vars) string { return name })),
		})}
		env, e := p.Environ(at)
		if e != nil && err == nil {
			err = e
		}
		sides = append(sides, Side{Name: name, Env: env})
	}
	add("scheduler", "MS_SCHED", text("RANK_ID", func(Vars) string { return "0" }))
	for i := range v.Servers {
		add("pserver-"+strconv.Itoa(i), "MS_PSERVER")
	}
	return sides, err
}

// mindsporeServers is for all processes of a job with parameter servers.
func mindsporeServers() variable {
	return only(func(v Vars) bool { return v.Servers > 0 }, number("MS_SERVER_NUM", func(v Vars) int { return v.Servers }))
}

// mindsporeRecovery separates the files that a scheduler leaves for its successor from those of other starts: it would
// wait for workers of a world that is gone. Releases up to 2.3 read it.
func mindsporeRecovery() variable {
	return variable{"MS_RECOVERY_PATH", func(v Vars) (string, bool, error) {
		on, _ := v.Parent.lookup("MS_ENABLE_RECOVERY")
		dir, _ := v.Parent.lookup("MS_RECOVERY_PATH")
		return filepath.Join(dir, v.Attempt), on == "1" && dir != "", nil
	}}
}

// mindsporeLogDir is for the files that MindSpore writes under GLOG_logtostderr=0.
func mindsporeLogDir() variable {
	return variable{"GLOG_log_dir", func(v Vars) (string, bool, error) {
		_, found := v.Parent.lookup("GLOG_log_dir")
		return v.LogDir, !found && v.LogDir != "", nil
	}}
}
