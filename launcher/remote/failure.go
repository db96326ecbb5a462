package remote

import (
	"fmt"
	"strings"
)

// failure is a message of ssh, in lower case, with a cause and a fix.
type failure struct{ said, what, fix string }

// failures are in the order in which they are looked for: a message may come with others.
var failures = []failure{
	{"remote host identification has changed", "its host key is another one than before",
		"if that is right, remove the old one by: ssh-keygen -R @HOST@"},
	{"host key verification failed", "its host key is not known here",
		"add it by ssh-keyscan @HOST@ >> ~/.ssh/known_hosts, or have it added by " +
			`PDSH_SSH_ARGS_APPEND="-o StrictHostKeyChecking=accept-new"`},
	{"unprotected private key file", "the file of the key may be read by others", "chmod 600 it"},
	{"permission denied", "no key of this user is accepted there",
		"put the public key into ~/.ssh/authorized_keys there; a password is never asked for"},
	{"too many authentication failures", "no key of this user is accepted there",
		`name the right one by PDSH_SSH_ARGS_APPEND="-i KEY -o IdentitiesOnly=yes"`},
	{"connection refused", "no sshd listens there", "start one, or give its port by --ssh_port"},
	{"could not resolve hostname", "there is no host of that name", "correct the host file, or the name service"},
	{"timed out", "it does not answer", "see that it is up, and that no firewall is between"},
	{"no route to host", "it does not answer", "see that it is up, and that no firewall is between"},
	{"network is unreachable", "its network cannot be reached from here", "see that it is up, and that there is a route"},
	{"kex_exchange_identification", "what listens there turns connections away",
		"see that it is sshd, and that its MaxStartups and AllowUsers let this host in"},
	{"connection closed by", "its sshd turns this user away", "see what its log says"},
	{"connection reset by", "its sshd turns this user away", "see what its log says"},
	{"bad configuration option", "ssh does not understand its options", "correct them, or ~/.ssh/config"},
	{"unknown option", "ssh does not understand its options", "correct them"},
	{"usage: ssh", "ssh does not understand its options", "correct them"},
}

// explain returns in one line why a remote shell has started no agent.
func explain(host, name string, ssh bool, status int, said string) error {
	last := lastLine(said)
	if ssh {
		low := strings.ToLower(said)
		for _, f := range failures {
			if strings.Contains(low, f.said) {
				return fmt.Errorf("ssh: %s: %s (%s)", f.what, strings.ReplaceAll(f.fix, "@HOST@", host), last)
			}
		}
	}
	switch {
	case status == 0 && last == "":
		return fmt.Errorf("%s ended without executing anything: it does not pass its standard input on; kubectl exec "+
			"needs -i for that", name)
	case last == "":
		return fmt.Errorf("%s ended with status %d before it executed anything", name, status)
	}
	return fmt.Errorf("%s ended with status %d before it executed anything: %s", name, status, last)
}

// lastLine is the last one that has anything in it.
func lastLine(text string) string {
	lines := strings.Split(text, "\n")
	for i := len(lines) - 1; i >= 0; i-- {
		if line := strings.TrimSpace(lines[i]); line != "" {
			return line
		}
	}
	return ""
}
