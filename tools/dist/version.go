package main

import (
	"cmp"
	"fmt"
	"regexp"
	"strings"
	"sync"
)

// described is the output of "git describe --tags --always --dirty", or "dev". A commit can have digits alone.
var described = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`^(?:v?(\d+(?:\.\d+)+)(?:-?(rc|alpha|beta)\.?(\d+))?(?:-(\d+)-g([0-9a-f]+))?|` +
		`([0-9a-f]{7,40})|dev)(-dirty)?$`)
})

// versions are a version by the rules of Python and of Debian. Commits behind a tag sort behind it, and a version
// without a tag before all others.
func versions(version string) (python, debian string, err error) {
	m := described().FindStringSubmatch(version)
	if m == nil {
		return "", "", fmt.Errorf("VERSION=%q: give one as git describe prints it, such as v1.2.3, v1.2.0-rc1 or "+
			"v1.2.3-4-g0123abc", version)
	}
	number, stage, nth, commits, commit, dirty := m[1], m[2], m[3], m[4], cmp.Or(m[5], m[6]), m[7]
	python, debian = number, number
	if number == "" {
		python, debian = "0.0.dev0", "0.0~git"
	}
	if stage != "" {
		python += map[string]string{"rc": "rc", "alpha": "a", "beta": "b"}[stage] + nth
		debian += "~" + stage + nth
	}
	var local []string
	if commit != "" {
		local = append(local, "g"+commit)
	}
	if dirty != "" {
		local = append(local, "dirty")
	}
	if commits != "" {
		python += ".post" + commits
		debian += "+" + commits
	}
	if len(local) > 0 {
		python += "+" + strings.Join(local, ".")
		debian += map[bool]string{true: ".", false: "+"}[commits != "" || number == ""] + strings.Join(local, ".")
	}
	return python, debian + "-1", nil
}
